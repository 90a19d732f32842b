"""A headless Chromium, driven through its debugging pipe: two file descriptors and JSON, nothing to install for it."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

FOUND = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


class Chromium:
    """A browser with one page.

    Attributes:
        errors: What the page wrote to the console as an error, and exceptions that nothing caught.
        requests: The addresses that the page asked for.
    """

    def __init__(self, profile: Path) -> None:
        assert FOUND is not None
        to_browser, from_browser = os.pipe(), os.pipe()
        # The browser reads from descriptor 3 and writes to 4; copies with high numbers cannot be in the way of them.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (to_browser[0], from_browser[1])]

        def connect() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        self.process = subprocess.Popen(
            [FOUND, *options, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"],
            preexec_fn=connect,
            pass_fds=(3, 4),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (to_browser[0], from_browser[1], *ends):
            os.close(end)
        self.writer, self.reader = os.fdopen(to_browser[1], "wb", 0), os.fdopen(from_browser[0], "rb", 0)
        self.number, self.held, self.session = 0, b"", None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the debugging protocol and return its result."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        self.writer.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.held:
            part = self.reader.read(1 << 16)
            assert part, "the browser has ended"
            self.held += part
        text, _, self.held = self.held.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, found: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown" or (method == "Runtime.consoleAPICalled" and found["type"] == "error"):
            self.errors.append(json.dumps(found))
        elif method == "Log.entryAdded" and found["entry"]["level"] == "error":
            self.errors.append(found["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"dialog: {found['message']}")
        elif method == "Page.loadEventFired":
            self.loaded = True

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Give the page the size of a window, or of a telephone below 500 pixels, and a light or dark scheme."""
        phone = width < 500
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Open an address and wait until the page has loaded."""
        self.loaded = False
        self.call("Page.navigate", url="about:blank")
        while not self.loaded:
            self._receive()
        self.errors.clear()
        self.requests.clear()
        self.loaded = False
        self.call("Page.navigate", url=address)
        while not self.loaded:
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path) -> Path:
        """Write a picture of the whole page and return its path."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.terminate()
        end = time.monotonic() + 10
        while self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        self.process.kill()
        self.process.wait()
        self.writer.close()
        self.reader.close()
