import signal


def pytest_configure():
    """In the background of a shell Ctrl-C is ignored, by all that is started there; tests of it need it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
