"""Tables, pictures and resumable parts, which everything that measures uses; needs no other room of the package."""
