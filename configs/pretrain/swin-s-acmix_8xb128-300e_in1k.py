_base_ = './swin-t-acmix_8xb128-300e_in1k.py'

model = dict(backbone=dict(depths=(2, 2, 18, 2), drop_path_rate=0.3))
