"""Measurements, each a ratio taken within one run; never collected by pytest.

python -m tests.bench              both tables on the demo checkpoint
python -m tests.bench overhead     what HTTP and JSON add, against FastAPI
python -m tests.bench load         predict() beside floods and large bodies
python -m tests.bench load --size 4b --device cuda --prompts small,long
"""
