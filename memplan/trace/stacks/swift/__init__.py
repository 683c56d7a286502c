"""ms-swift's trainers, whose own code is traced."""
