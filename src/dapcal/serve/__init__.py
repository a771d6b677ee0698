"""A model as an HTTP service: rows of JSON in, calibrated predictions out.

`served.py` says what is served, `app.py` is the service, and the rest is what it is made of: the shapes of rows and
predictions (`schema.py`), errors (`errors.py`), limits of a request (`gate.py`) and of a connection (`connection.py`),
a straight way (`direct.py`) to waiting rows that are put together (`batching.py`), numbers for Prometheus
(`metrics.py`), a line for every answer (`access.py`), a page for people (`page.py`), one model after another
(`switch.py`), and a process that runs it all (`server.py`, `process.py`), or several of them at one address
(`workers.py`).
"""

try:
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise ImportError(f"The service needs {error.name}; install it with: pip install 'dapcal[serve]'") from error

from dapcal.serve.access import AccessLog
from dapcal.serve.app import create_app
from dapcal.serve.process import run
from dapcal.serve.served import Field, Limits, Served
from dapcal.serve.server import Security
from dapcal.serve.workers import Work, run_several

__all__ = ["AccessLog", "Field", "Limits", "Security", "Served", "Work", "create_app", "run", "run_several"]
