"""From a request to the model and back, as far as the APIs have it in common."""
