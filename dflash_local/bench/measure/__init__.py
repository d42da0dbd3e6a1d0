"""The measurements: one request at a time, several at once, and single passes of the target."""
