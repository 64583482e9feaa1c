"""Headless Chromium, driven through its DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import websocket

from tests.router.fake_worker import free_port, until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One tab. `requests` are the addresses that it asked for, `complaints` what its console and CSP said."""

    def __init__(self, socket: websocket.WebSocket) -> None:
        self._socket = socket
        self._last = 0
        self.requests: list[str] = []
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Runs a command and returns its result; what comes in between is noted."""
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": method, "params": params}))
        while True:
            told = json.loads(self._socket.recv())
            if told.get("id") == self._last:
                assert "error" not in told, told
                return told["result"]
            self._note(told)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        until(lambda: self("document.readyState") == "complete")

    def size(self, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def __call__(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def type(self, selector: str, text: str) -> None:
        self(f"document.querySelector({selector!r}).focus()")
        self.call("Input.insertText", text=text)

    def press_enter(self) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
            )

    def screenshot(self, file: Path, whole: bool = False) -> None:
        told = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(told["data"]))

    def _note(self, told: dict[str, Any]) -> None:
        params = told.get("params", {})
        match told.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.complaints.append(params["entry"]["text"])


@contextmanager
def browser() -> Iterator[Page]:
    """A fresh Chromium with one empty tab."""
    assert CHROMIUM is not None
    port = free_port()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        command += [f"--remote-debugging-port={port}", f"--user-data-dir={profile}", "--remote-allow-origins=*"]
        process = subprocess.Popen([*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            tabs: list[dict[str, Any]] = []

            def listed() -> bool:
                try:
                    told = httpx.get(f"http://127.0.0.1:{port}/json", timeout=2).json()
                except httpx.TransportError:
                    return False
                tabs[:] = [tab for tab in told if tab["type"] == "page"]
                return bool(tabs)

            until(listed, 60)
            socket = websocket.create_connection(tabs[0]["webSocketDebuggerUrl"], timeout=30)
            try:
                yield Page(socket)
            finally:
                socket.close()
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
