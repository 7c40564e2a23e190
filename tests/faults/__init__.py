"""Inputs on which a wrong answer was once seen, and others of their kinds; each module names its kind."""
