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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TIMEOUT_S = 300
_FLAGS = (
    "--headless",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


@dataclass(slots=True)
class Visit:
    """What a page asked for while it was open, and the errors and warnings on its console and of its scripts."""

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


class Browser:
    """One browser with one tab. Only `browser` makes one."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._received, self._number, self._session = b"", 0, ""
        self.visit = Visit()
        os.set_blocking(from_browser, False)
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        number = self._number
        command = {"id": number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._to, json.dumps(command).encode() + b"\0")
        while (message := self._next()).get("id") != number:
            pass
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        return dict(message["result"])

    def open(self, address: str) -> Visit:
        """Open a page and wait until it and all that it loads are there."""
        self.visit = Visit()
        self._loaded = False
        failed = self.send("Page.navigate", url=address).get("errorText")
        if failed:
            raise RuntimeError(f"{address}: {failed}")
        while not self._loaded:
            self._next()
        self.evaluate("new Promise(done => setTimeout(done, 50))")  # scripts that run after the page has loaded
        return self.visit

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is waited for."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["text"])
        return answer["result"].get("value")

    def resize(self, width: int, height: int = 844) -> None:
        """Set the size of the window in pixels; a narrow one is a phone's."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, scheme: str) -> None:
        """Tell pages that their reader prefers ``light`` or ``dark``."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def _next(self) -> dict[str, Any]:
        """Return the browser's next message; note what it says about the page."""
        until = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._received:
            try:
                read = os.read(self._from, 1 << 20)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"the browser was silent for {TIMEOUT_S} s") from None
                time.sleep(0.002)
                continue
            if not read:
                raise RuntimeError("the browser has ended")
            self._received += read
        line, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent":
            self.visit.requests.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.visit.complaints.append(str(details.get("exception", {}).get("description", details["text"])))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.visit.complaints.append(" ".join(str(word.get("value", "")) for word in params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.visit.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser whose profile is in ``folder``; end it and all its processes afterwards."""
    assert CHROMIUM is not None
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    # A shell gives the two pipes the numbers that the browser wants them to have.
    shell = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
    words = ["bash", "-c", shell, CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
    with (folder / "chromium.log").open("w") as log:
        process = subprocess.Popen(
            words,
            pass_fds=(commands, answers),
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "HOME": str(folder)},
        )
    os.close(commands)
    os.close(answers)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to_browser)
        os.close(from_browser)
