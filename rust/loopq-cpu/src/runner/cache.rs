//! Keys and values of the tokens so far, for each block each time that it runs.

use std::sync::{Mutex, PoisonError};

use super::coded::{turn, Coded};
use super::program::{Block, Kind, Op, Program};
use super::vector::{attend, Half, Number, Room};
use loopq_core::memory::collected;
use loopq_core::simd::Isa;
use loopq_core::{dims, Error, Result};

const WHAT: &str = "keys and values";

/// Keys and values of one head, a row of each for a token.
#[derive(Debug)]
pub(super) struct Kept<T> {
    keys: Vec<T>,
    values: Vec<T>,
}

impl<T> Kept<T> {
    const EMPTY: Self = Self { keys: Vec::new(), values: Vec::new() };

    fn reserve(&mut self, tokens: usize, row: usize) -> Result<()> {
        let n = dims::product(WHAT, tokens, row)?;
        let bytes = dims::product(WHAT, n, size_of::<T>())?;
        let missing = |_| Error::OutOfMemory { what: WHAT, bytes };
        self.keys.try_reserve(n).map_err(missing)?;
        self.values.try_reserve(n).map_err(missing)
    }

    fn clear(&mut self) {
        self.keys.clear();
        self.values.clear();
    }
}

impl<T: Number> Kept<T> {
    fn push(&mut self, key: &[f32], value: &[f32]) {
        self.keys.extend(key.iter().map(|&v| T::of(v)));
        self.values.extend(value.iter().map(|&v| T::of(v)));
    }
}

/// Keys or values of one head, in their storage type.
#[derive(Debug)]
pub(super) enum Head {
    F32(Kept<f32>),
    Half(Kept<Half>),
    Eight(Kept<u8>),
    Four(Kept<u8>),
}

impl Head {
    fn new(kind: Kind) -> Self {
        match kind {
            Kind::F32 => Self::F32(Kept::EMPTY),
            Kind::Bf16 => Self::Half(Kept::EMPTY),
            Kind::Eight => Self::Eight(Kept::EMPTY),
            Kind::Four => Self::Four(Kept::EMPTY),
        }
    }

    /// Adds those of a token, which may be changed. Room was reserved before anything ran.
    pub(super) fn push(&mut self, key: &mut [f32], value: &mut [f32]) {
        match self {
            Self::F32(kept) => kept.push(key, value),
            Self::Half(kept) => kept.push(key, value),
            Self::Eight(kept) => {
                Coded::<8>::push(&mut kept.keys, key);
                Coded::<8>::push(&mut kept.values, value);
            }
            Self::Four(kept) => {
                turn(key);
                turn(value);
                Coded::<4>::push(&mut kept.keys, key);
                Coded::<4>::push(&mut kept.values, value);
            }
        }
    }

    /// Attention of some queries, which may be changed, to the first tokens, as many as `room` is for.
    pub(super) fn attend(&self, queries: &mut [f32], room: &mut Room, out: &mut [f32]) {
        let isa = Isa::best();
        match self {
            Self::F32(kept) => attend(isa, queries, &kept.keys[..], &kept.values[..], room, out),
            Self::Half(kept) => attend(isa, queries, &kept.keys[..], &kept.values[..], room, out),
            Self::Eight(Kept { keys, values }) => {
                attend(isa, queries, Coded::<8>(keys), Coded::<8>(values), room, out);
            }
            Self::Four(Kept { keys, values }) => {
                let head = room.width();
                queries.chunks_exact_mut(head).for_each(turn);
                attend(isa, queries, Coded::<4>(keys), Coded::<4>(values), room, out);
                out.chunks_exact_mut(head).for_each(turn);
            }
        }
    }

    fn reserve(&mut self, tokens: usize, head: usize) -> Result<()> {
        match self {
            Self::F32(kept) => kept.reserve(tokens, head),
            Self::Half(kept) => kept.reserve(tokens, head),
            Self::Eight(kept) => kept.reserve(tokens, Coded::<8>::bytes(head)),
            Self::Four(kept) => kept.reserve(tokens, Coded::<4>::bytes(head)),
        }
    }

    fn clear(&mut self) {
        match self {
            Self::F32(kept) => kept.clear(),
            Self::Half(kept) => kept.clear(),
            Self::Eight(kept) | Self::Four(kept) => kept.clear(),
        }
    }
}

/// Of all heads: `slots[i][j]` is head j of the i-th block that runs.
#[derive(Debug)]
pub(super) struct Cache {
    pub(super) slots: Vec<Vec<Mutex<Head>>>,
    pub(super) seen: usize,
    widths: Vec<usize>,
}

impl Cache {
    pub(super) fn new(program: &Program) -> Result<Self> {
        let ran = program.order.iter().filter_map(|op| match *op {
            Op::Block(i) => Some(&program.blocks[i]),
            _ => None,
        });
        let widths = ran.clone().map(|block| block.head).collect();
        let heads = |block: &Block| {
            collected("heads", (0..block.kv_heads).map(|_| Mutex::new(Head::new(program.kept))))
        };
        let slots = ran.map(heads).collect::<Result<_>>()?;
        Ok(Self { slots, seen: 0, widths })
    }

    fn each(&mut self, mut work: impl FnMut(&mut Head, usize) -> Result<()>) -> Result<()> {
        for (slot, &width) in self.slots.iter_mut().zip(&self.widths) {
            for head in slot {
                work(head.get_mut().unwrap_or_else(PoisonError::into_inner), width)?;
            }
        }
        Ok(())
    }

    /// Room for so many tokens more: what is added later needs no memory.
    pub(super) fn reserve(&mut self, tokens: usize) -> Result<()> {
        self.each(|head, width| head.reserve(tokens, width))
    }

    /// Forgets all tokens; the room for them stays.
    pub(super) fn restart(&mut self) {
        let _ = self.each(|head, _| {
            head.clear();
            Ok(())
        });
        self.seen = 0;
    }
}
