"""The blocks of the cache: shared, kept while there is room, and never lost."""

from meshwright.serving.scheduling import BlockPool, Request


def test_a_named_block_is_kept_until_its_room_is_needed():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.name(block, bytes([block]))
    pool.free(blocks)
    assert pool.available == 3 and pool.used == 0
    assert pool.prefix([b"\0", b"\1", b"\2"]) == blocks
    assert pool.allocate(1) == [blocks[2]]  # the end of the prefix goes first
    assert pool.prefix([b"\0", b"\1", b"\2"]) == blocks[:2]


def test_a_shared_block_stays_until_its_last_user_leaves():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.name(block, b"prefix")
    pool.share([block])
    pool.free([block])
    assert (pool.users(block), pool.used) == (1, 1)
    pool.free([block])
    assert (pool.used, pool.idle([block])) == (0, 1)
    pool.share([block])
    assert (pool.used, pool.available) == (1, 1)


def test_the_first_of_two_equal_blocks_keeps_the_name():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.name(first, b"same")
    pool.name(second, b"same")
    pool.free([second])
    assert pool.prefix([b"same"]) == [first]
    assert pool.allocate(1) == [second]


def test_a_name_says_all_tokens_up_to_the_end_of_its_block():
    names = {text: Request(0, text, 1).names(2) for text in (b"abcd", b"abce", b"xbcd", b"abc")}
    assert names[b"abcd"][0] == names[b"abce"][0] == names[b"abc"][0]
    assert names[b"abcd"][1] != names[b"abce"][1]
    assert names[b"abcd"][1] != names[b"xbcd"][1]
    assert len(names[b"abc"]) == 1
