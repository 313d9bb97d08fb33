"""The null platform: a complete fake accelerator on the reference ops; the template for vendors, and what core's tests run on.

It is no installed plugin: name it with ``FITMENT_PLUGINS=null=fitment.null.plugin``.
"""
