# Template for your own data in COCO format: copy it, and change the classes
# and the paths. `classes` names the categories of the annotation files. In
# another folder `_base_` starts with 'acmix_det::sasa/' instead of './'.
_base_ = './retinanet_r50-sasa-pretrained_fpn-sasa_1x_coco.py'

# a list also of one class: ['cat']
classes = ['cat', 'dog']
data_root = 'data/custom/'
train_ann = 'annotations/train.json'
train_images = 'train/'
val_ann = 'annotations/val.json'
val_images = 'val/'

# all below follows
metainfo = dict(classes=classes)
model = dict(bbox_head=dict(num_classes=len(classes)))
train_dataloader = dict(
    dataset=dict(
        data_root=data_root,
        ann_file=train_ann,
        data_prefix=dict(img=train_images),
        metainfo=metainfo))
val_dataloader = dict(
    dataset=dict(
        data_root=data_root,
        ann_file=val_ann,
        data_prefix=dict(img=val_images),
        metainfo=metainfo))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + val_ann)
test_evaluator = val_evaluator

# refuses a string for `classes`, and another number of classes in the head
custom_hooks = [dict(type='NumClassCheckHook')]
