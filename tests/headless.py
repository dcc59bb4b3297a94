"""A headless Chromium over its debugging pipe: JSON messages that end in a zero byte, on file descriptors 3 and 4.

Documented at chromedevtools.github.io/devtools-protocol (--remote-debugging-pipe). Needs no package and no port.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
)  # fmt: skip
AS_3_AND_4 = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
LONGEST_SECONDS = 40


class Browser:
    """One page in a browser of its own."""

    def __init__(self, profile):
        to_read, self.to_browser = os.pipe()
        self.from_browser, to_write = os.pipe()
        command = [sys.executable, "-c", AS_3_AND_4, str(to_read), str(to_write), BROWSER, *FLAGS]
        self.process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self.number, self.pending, self.told, self.session = 0, b"", [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """What the browser answers. Its events on the way are kept in `told`."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.told.append(answer)

    def receive(self):
        """The next message."""
        until = time.monotonic() + LONGEST_SECONDS
        while b"\0" not in self.pending:
            ready, _, _ = select.select([self.from_browser], [], [], max(until - time.monotonic(), 0))
            assert ready, "the browser says nothing"
            part = os.read(self.from_browser, 1 << 20)
            assert part, "the browser has ended"
            self.pending += part
        message, _, self.pending = self.pending.partition(b"\0")
        return json.loads(message)

    def open(self, address, width=1280, height=900, dark=False, media=""):
        """Opens a page at a size; below 600 pixels as a phone. media: 'print'."""
        self.call("Page.navigate", url="about:blank")  # an address that differs behind '#' only would load nothing
        self.told.clear()
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=phone,
            deviceScaleFactor=2 if phone else 1,
        )  # fmt: skip
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=media, features=scheme)
        self.call("Page.navigate", url=address)
        while self.ask("document.readyState + ' ' + (location.href !== 'about:blank')") != "complete true":
            time.sleep(0.02)

    def ask(self, expression):
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def drag(self, x0, x1, y):
        """Presses the left button at one place and lets go at another."""
        mouse = lambda kind, x, **more: self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        mouse("mouseMoved", x0)
        mouse("mousePressed", x0, button="left", buttons=1, clickCount=1)
        for part in (0.25, 0.5, 0.75, 1.0):
            mouse("mouseMoved", x0 + (x1 - x0) * part, button="left", buttons=1)
        mouse("mouseReleased", x1, button="left", clickCount=1)

    def press(self, key):
        """A key goes down and up."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def complaints(self):
        """What the console, the log and the page's errors said since the page was opened."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        said = [event["params"] for event in self.told if event.get("method") in kinds]
        console = [event["params"] for event in self.told if event.get("method") == "Runtime.consoleAPICalled"]
        return said + [entry for entry in console if entry["type"] in ("error", "warning", "assert")]

    def asked_for(self):
        """Every address that the page requested."""
        sent = [event["params"] for event in self.told if event.get("method") == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def picture(self, path, height=None):
        """Writes what is seen, or so many pixels of the page from its top, as a PNG file."""
        width = self.ask("innerWidth")
        clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}} if height else {}
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=bool(height), **clip)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self):
        """Ends the browser."""
        with contextlib.suppress(OSError, AssertionError):
            self.session = None
            self.call("Browser.close")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.to_browser)
        os.close(self.from_browser)
