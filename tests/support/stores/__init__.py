"""Object stores and web servers, real and made to misbehave."""
