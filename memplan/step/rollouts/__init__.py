"""Generation between steps by the model that is trained."""
