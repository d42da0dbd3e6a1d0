"""A running server under many clients, hostile requests, damaged files and restarts."""
