"""Communication between ranks: uneven all-to-all and the ring shift. Sizes come from the layout, never from a handshake."""
