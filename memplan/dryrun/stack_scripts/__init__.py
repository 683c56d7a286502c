"""Scripts as their users write them, of stacks whose own code is traced in a process of its own."""
