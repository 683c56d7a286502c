"""Parameters that are divided over ranks: who orthogonalises which matrix, and how its pieces get there and back."""
