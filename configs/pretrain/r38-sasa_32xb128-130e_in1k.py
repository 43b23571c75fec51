_base_ = './r50-sasa_32xb128-130e_in1k.py'

model = dict(backbone=dict(depth=38))
