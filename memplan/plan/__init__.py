"""Where model, training setup and GPU meet: the memory plan, and what follows from it."""
