"""A stand-in for OpenVINO: with this folder on the path, ``openvino_server.py`` imports these modules."""
