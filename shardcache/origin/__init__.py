"""Object stores, web servers and files, behind one Protocol."""
