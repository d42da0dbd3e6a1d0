"""The files to convert: found on the hub or in a folder, and read with care."""
