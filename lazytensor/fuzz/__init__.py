"""Random PyTorch programs, run on CPU eager and on ``ltc``, and compared in everything a program can see.

``generate`` writes a program line by line, ``run`` runs it on one device and notes what can be seen, ``compare`` says
where two runs differ, ``shrink`` makes a failing program small, ``planted`` puts bugs into lazytensor to show that they
are found.
"""
