"""Pages to look at in a browser: each one is a single file that asks no network for anything.

`plan.page` shows a plan, `runs.page` what runs wrote into their metrics. Both fill a template of this folder
(`template.py`); they show what the planner and the runs have computed already.
"""
