"""HTTP for all of the APIs: who is answered, limits, errors, streams, the access log."""
