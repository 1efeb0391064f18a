"""Functions that take bytes from elsewhere, and the program that fuzzes one of them."""
