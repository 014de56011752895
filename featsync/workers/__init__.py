"""How moves are carried out."""
