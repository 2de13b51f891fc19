"""What NVIDIA's tritonclient does with a server, in an environment of its own; prints what it got as JSON."""

from __future__ import annotations

import json
import sys

import numpy as np
from tritonclient import http

client = http.InferenceServerClient(sys.argv[1])
texts = http.InferInput("text_input", [2], "BYTES")
texts.set_data_from_numpy(np.array(["hello", "zz"], object))  # as bytes, which is its default
found = {"live": client.is_server_live(), "ready": client.is_server_ready(), "model": client.is_model_ready("tiny")}
found["metadata"] = client.get_model_metadata("tiny")["name"]
found["index"] = client.get_model_repository_index()
answer = client.infer("tiny", [texts], request_id="r7", parameters={"beam_size": 2})
found["bytes"] = [row[0].decode() for row in answer.as_numpy("text_output")]
found["scores"] = answer.as_numpy("scores").reshape(-1).tolist()
wanted = [http.InferRequestedOutput("text_output", binary_data=False)]
answer = client.infer("tiny", [texts], outputs=wanted, request_compression_algorithm="gzip")
found["compressed"] = [row[0] for row in answer.as_numpy("text_output")]
ids = http.InferInput("input_ids", [1, 3], "INT64")
ids.set_data_from_numpy(np.array([json.loads(sys.argv[2])], np.int64))
found["ids"] = client.infer("tiny", [ids]).as_numpy("output_ids").reshape(-1).tolist()
found["async"] = [row[0].decode() for row in client.async_infer("tiny", [texts]).get_result().as_numpy("text_output")]
try:
    client.infer("tiny", [texts], parameters={"beam_size": 0})
except http.InferenceServerException as problem:
    found["problem"] = [problem.status(), problem.message()]
json.dump(found, sys.stdout)
