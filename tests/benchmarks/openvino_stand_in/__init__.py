"""On the path of an interpreter without OpenVINO this folder is what ``openvino_server.py`` imports."""
