//! Every way in which a program and a layout are refused.
#![allow(clippy::unwrap_used)]

use loopq_core::error::Kind;
use loopq_core::grid::{Grid, ScaleType, Search, Trellis, Values};
use loopq_core::Error;
use loopq_cpu::matmul::{Layout, Precision};
use loopq_cpu::runner::{Block, Kind as Numbers, Norms, Op, Program, Runner};

fn grid(bits: u32) -> Grid {
    let (scale_type, search) = (ScaleType::F32, Search::Max);
    Grid { bits, group_size: 0, symmetric: true, signed: false, scale_type, search, values: Values::Even }
}

/// Asserts the variant, the class, and that the message holds all of `parts`.
#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, Error>, kind: Kind, parts: &[&str]) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    for part in parts {
        assert!(error.to_string().contains(part), "{part:?} is not in: {error}");
    }
}

/// A decoder of one block: two heads of width 2 that share keys and values, and a gate of four outputs.
fn program() -> Program {
    let block = Block {
        heads: 2,
        kv_heads: 1,
        head: 2,
        neighbours: false,
        scale: 1.0,
        qkv: vec![1, 1],
        gates: false,
        qk_bias: Vec::new(),
        qk_norms: None,
        out: 1,
        gate_up: vec![1, 1],
        down: 1,
        norms: [Norms::default(); 2],
    };
    Program {
        width: 4,
        shapes: vec![[3, 4], [4, 4]],
        norms: Vec::new(),
        blocks: vec![block],
        order: vec![Op::Block(0)],
        head: 0,
        precision: Precision::Int8,
        kept: Numbers::F32,
    }
}

#[test]
fn programs() {
    assert!(Runner::new(program()).is_ok());
    let refuse = |change: &dyn Fn(&mut Program), kind: Kind, part: &str| {
        let mut wrong = program();
        change(&mut wrong);
        refused(Runner::new(wrong), kind, &[part]);
    };
    for shape in [[0, 4], [3, 0]] {
        refuse(&|p| p.shapes[0] = shape, Kind::Config, "1 or more outputs and inputs");
    }
    refuse(&|p| p.width = 3, Kind::Config, "a block's weight");
    refuse(&|p| p.shapes[0] = [3, 5], Kind::Config, "inputs of the head: expected 4, got 5");
    refuse(&|p| p.head = 2, Kind::Config, "a weight's number");
    refuse(&|p| p.blocks[0].heads = 0, Kind::Config, "a divisor of it");
    refuse(&|p| p.blocks[0].gate_up = vec![0, 1, 1], Kind::Config, "an even number, got 11");
    // Sizes that would wrap round.
    let wide = |p: &mut Program, kv_heads: usize| {
        (p.blocks[0].heads, p.blocks[0].kv_heads) = (usize::MAX / 2 + 1, kv_heads);
    };
    refuse(&|p| wide(p, 1), Kind::Config, "the size of queries overflows");
    refuse(&|p| p.shapes[1] = [usize::MAX, 4], Kind::Config, "the size of a block's weights overflows");
    // Memory for each head is reserved before anything runs.
    let heads = |p: &mut Program| {
        let n = 1 << 50;
        p.shapes = vec![[3, 4], [2 * n, 4], [4, 2 * n], [4, 4]];
        let block = &mut p.blocks[0];
        (block.heads, block.kv_heads, block.qkv, block.out) = (n, n, vec![1, 1, 1], 2);
        (block.gate_up, block.down) = (vec![3, 3], 3);
    };
    refuse(&heads, Kind::Memory, "no memory for heads");
}

#[test]
fn layouts_that_memory_does_not_hold() {
    let wide = Layout::new(1, 1 << 52, Grid { group_size: 1, ..grid(4) });
    refused(wide, Kind::Memory, &["no memory for the blocks of a layout"]);
    // Streams of one row are filled up to 32: a plain layout of so many rows has a size, this one has none.
    let tall = Grid { values: Values::Trellis(Trellis::new(4, 10, 1).unwrap()), ..grid(4) };
    refused(Layout::new(1 << 57, 1, tall), Kind::Config, &["the size of a packed weight overflows"]);
    assert!(Layout::new(1 << 57, 1, grid(4)).is_ok());
}
