"""What a Python program calls to train: the trainers, classes of arguments and models that it names, in keys of trainers' files."""
