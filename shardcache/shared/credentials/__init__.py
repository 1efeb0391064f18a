"""Credentials in the environment: those that a session hands over, and others for object stores."""
