"""A server for bundles: the Open Inference Protocol v2 and Triton's generate over HTTP, on the scheduler of `model`.

`app.py` has the paths, `inference.py` and `generation.py` what they answer, `tensors.py` the form of tensors,
`parameters.py` the options of a request, `served.py` the models in service, `server.py` the process.
"""

from tfm_export.serve.limits import RequestLimits
from tfm_export.serve.served import ServedModels
from tfm_export.serve.server import ServerOptions, serve

__all__ = ["RequestLimits", "ServedModels", "ServerOptions", "serve"]
