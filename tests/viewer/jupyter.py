"""JupyterLab as a user has it: a server of its own, a kernel, and a notebook in the browser."""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import regard

START_S = 120  # on a machine that is busy
APP = "window.jupyterapp?.shell?.currentWidget?.context?.isReady"
RUN = """async () => {
  const { context } = jupyterapp.shell.currentWidget;
  await context.sessionContext.ready;
  return jupyterapp.commands.execute("notebook:run-all-cells");
}"""
# Nothing of these asks the network.
SETTINGS = {"@jupyterlab/apputils-extension/notification": {"fetchNews": "false"}}


class Lab:
    """A server of JupyterLab in a folder, with every place that Jupyter writes to inside it."""

    def __init__(self, folder):
        self.folder, self.token = folder, secrets.token_hex(16)
        places = {
            "HOME": "home", "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "run", "IPYTHONDIR": "ipython",
            "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        }  # fmt: skip
        own = {name: str(folder / "jupyter" / place) for name, place in places.items()}
        for name, settings in SETTINGS.items():
            path = folder / "jupyter" / "settings" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps({"checkForUpdates": False, **settings}))
        source = str(Path(regard.__file__).parents[1])
        environment = {**os.environ, **own, "PYTHONPATH": source, "JUPYTER_PREFER_ENV_PATH": "1"}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.log = folder / "jupyter" / "log"
        options = {
            "ServerApp.ip": "127.0.0.1", "ServerApp.port": port, "ServerApp.port_retries": 0,
            "ServerApp.root_dir": folder, "ServerApp.allow_root": True,
            "IdentityProvider.token": self.token, "LabApp.expose_app_in_browser": True,
            "LabApp.extension_manager": "readonly", "LanguageServerManager.autodetect": False,
        }  # fmt: skip
        command = [sys.executable, "-m", "jupyterlab", "--no-browser"]
        command += [f"--{name}={value}" for name, value in options.items()]
        with self.log.open("w") as log:
            # One signal ends this session; kernels have their own, and end with their server.
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def wait(self):
        """Waits until it answers."""
        end = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < end:
            try:
                urllib.request.urlopen(f"{self.address}/api?token={self.token}", timeout=10).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise RuntimeError(f"JupyterLab does not answer:\n{self.log.read_text()[-2000:]}")

    def write(self, name, *cells):
        """A notebook of cells of code, and its address."""
        made = [
            {
                "cell_type": "code", "id": f"cell-{n}", "source": source, "metadata": {},
                "outputs": [], "execution_count": None,
            }
            for n, source in enumerate(cells)
        ]  # fmt: skip
        spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook = {"metadata": {"kernelspec": spec}, "nbformat": 4, "nbformat_minor": 5}
        (self.folder / name).write_text(json.dumps({**notebook, "cells": made}))
        return f"{self.address}/doc/tree/{name}?token={self.token}"

    def run(self, page, address):
        """Opens a notebook and runs its cells; those with an error make it fail."""
        page.goto(address)
        page.wait_for_function(APP, timeout=1000 * START_S)
        assert page.evaluate(RUN), page.locator(".jp-OutputArea-output").all_inner_texts()

    def close(self):
        """Ends the server, its kernels, and whatever they started."""
        if self.process.poll() is None:
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        for signal_ in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, signal_)
            except ProcessLookupError:
                break
        self.process.wait()
