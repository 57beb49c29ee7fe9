"""Empty: the engine looks for launch hooks here and goes on without them."""
