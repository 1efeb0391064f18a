"""Output for people and as JSON: tables, pages, frames."""
