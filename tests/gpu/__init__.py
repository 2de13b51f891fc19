"""What only a GPU can show: `pytest -m gpu`, `make gpu-check`. Without one each test says why it is skipped."""
