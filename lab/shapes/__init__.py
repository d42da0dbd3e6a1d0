"""Models of random weights that have the shapes of real ones: speed does not depend on values."""
