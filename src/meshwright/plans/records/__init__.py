"""Records of the program and of the search, so that a saved plan can be explained."""
