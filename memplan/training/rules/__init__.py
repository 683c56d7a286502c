"""What stacks and methods make of a training config before its names are looked up."""
