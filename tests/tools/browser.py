"""Pages in a real browser: Chromium without a window, driven through its DevTools protocol on two pipes.

No package is needed: the browser reads commands from its descriptor 3 and writes answers and events to its descriptor
4, each a JSON object that ends with a zero byte.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TIMEOUT_S = 300
_FLAGS = (  # tests may run as root: no sandbox
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
)


class Browser:
    """One browser with one tab; only `browser` makes one.

    Attributes:
        requests: what the open page asked for.
        complaints: errors and warnings on its console and of its scripts.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._received, self._number, self._session, self._is_loaded = b"", 0, {}, False
        self.requests: list[str] = []
        self.complaints: list[str] = []
        os.set_blocking(from_browser, False)
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        number = self._number
        command = {"id": number, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(command).encode() + b"\0")
        while (message := self._next()).get("id") != number:
            pass
        assert "result" in message, message
        return dict(message["result"])

    def open(self, address: str) -> None:
        """Open a page and wait until it and all that it loads are there."""
        self.requests, self.complaints, self._is_loaded = [], [], False
        self.send("Page.navigate", url=address)
        while not self._is_loaded:
            self._next()
        self.evaluate("new Promise(done => setTimeout(done, 50))")  # scripts that run after the page has loaded

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is waited for."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def _next(self) -> dict[str, Any]:
        """Return the browser's next message; note what it says about the page."""
        until = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._received:
            try:
                read = os.read(self._from, 1 << 20)
            except BlockingIOError:
                assert time.monotonic() < until, "the browser is silent"
                time.sleep(0.002)
                continue
            assert read, "the browser has ended"
            self._received += read
        line, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._is_loaded = True
        elif event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown" or (
            event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert")
        ):
            self.complaints.append(str(params))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(params["entry"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser whose profile is in ``folder``; end it and all its processes afterwards."""
    assert CHROMIUM is not None
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    # A shell gives the two pipes the numbers that the browser wants them to have.
    shell = f'exec "$0" "$@" 3<&{commands} 4>&{answers} >{folder}/chromium.log 2>&1'
    words = ["bash", "-c", shell, CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
    environ = {**os.environ, "HOME": str(folder)}
    process = subprocess.Popen(words, pass_fds=(commands, answers), start_new_session=True, env=environ)
    os.close(commands)
    os.close(answers)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to_browser)
        os.close(from_browser)
