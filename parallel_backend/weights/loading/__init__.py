"""Loading of weights from files into layers. A machine reads every byte once."""
