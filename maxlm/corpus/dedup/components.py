"""Connected components in bounded memory: alternating large-star and small-star (Kiveris et al. 2014, doi 10.1145/2670979.2670997).

A union-find needs memory for every node; here each round is a sort and a join on disk, and O(log^2 n) rounds end in stars.
"""

from maxlm.corpus.dedup.database import Database

# Each node hands its larger neighbours to the smallest node among itself and all its neighbours. `parent` < `child` in every link, so
# the larger neighbours of a node are its children.
_LARGE_STAR = """
CREATE TABLE next AS
SELECT DISTINCT links.child, least(links.parent, up.root) AS parent FROM links
LEFT JOIN (SELECT child, min(parent) AS root FROM links GROUP BY child) up ON up.child = links.parent
"""
# Each node hands its smaller neighbours and itself to the smallest of them.
_SMALL_STAR = """
CREATE TABLE next AS
SELECT child, parent FROM (
  SELECT links.parent AS child, root AS parent FROM links JOIN (SELECT child, min(parent) AS root FROM links GROUP BY child) USING (child)
  WHERE links.parent <> root
  UNION
  SELECT child, min(parent) FROM links GROUP BY child)
"""


def connect(database: Database) -> None:
    """Make table `labels` (node, root) from `edges` (low, high; low < high): for each node of an edge but the smallest of its component,
    that smallest node.
    """
    database.run("CREATE TABLE links AS SELECT DISTINCT high AS child, low AS parent FROM edges")
    while not _is_stars(database):
        for step in (_LARGE_STAR, _SMALL_STAR):
            database.run(step)
            database.run("DROP TABLE links")
            database.run("ALTER TABLE next RENAME TO links")
    database.run("CREATE TABLE labels AS SELECT child AS node, parent AS root FROM links")


def _is_stars(database: Database) -> bool:
    """Every node has one parent, and no parent has one."""
    if database.number("SELECT count(*) - count(DISTINCT child) FROM links"):
        return False
    return not database.number("SELECT count(*) FROM links SEMI JOIN (SELECT child AS parent FROM links) USING (parent)")
