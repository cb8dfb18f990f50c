"""What holds for all tests."""

import signal


def pytest_configure() -> None:
    """Heed SIGINT, which nohup and background jobs ignore: processes that tests start would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
