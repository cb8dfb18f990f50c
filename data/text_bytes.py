"""The vocabulary of a text that is read byte by byte."""

NUM_BYTES = 256
BYTES = tuple(chr(byte) if 32 < byte < 127 else f"<{byte:02x}>" for byte in range(NUM_BYTES))
