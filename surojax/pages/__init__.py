"""HTML pages, each a single file that loads nothing from the network.

`plan.page` shows a plan, `runs.page` what runs wrote into their metrics. Both fill a template of this folder
(`template.py`); they show what the planner and the runs have computed already.
"""
