//! Keys and values of the tokens so far, for each block each time that it runs.

use std::sync::{Mutex, PoisonError};

use super::program::{Block, Op, Program};
use super::vector::{attend, Half, Number};
use crate::memory::collected;
use crate::simd::Isa;
use crate::{dims, Error, Result};

/// Keys and values of one head.
pub(super) trait KeyValue {
    /// Adds those of a token.
    fn push(&mut self, key: &[f32], value: &[f32]);
    /// Attention of a query to the first `weights.len()` tokens.
    fn attend(&self, query: &[f32], weights: &mut [f32], out: &mut [f32]);
}

#[derive(Debug)]
pub(super) struct Kept<T> {
    keys: Vec<T>,
    values: Vec<T>,
}

impl<T: Number> KeyValue for Kept<T> {
    fn push(&mut self, key: &[f32], value: &[f32]) {
        // Room was reserved before anything ran.
        self.keys.extend(key.iter().map(|&v| T::of(v)));
        self.values.extend(value.iter().map(|&v| T::of(v)));
    }

    fn attend(&self, query: &[f32], weights: &mut [f32], out: &mut [f32]) {
        let n = weights.len() * query.len();
        attend(Isa::best(), query, &self.keys[..n], &self.values[..n], weights, out);
    }
}

/// Of one head, as it is stored.
#[derive(Debug)]
pub(super) enum Head {
    F32(Kept<f32>),
    Half(Kept<Half>),
}

impl KeyValue for Head {
    fn push(&mut self, key: &[f32], value: &[f32]) {
        match self {
            Self::F32(kept) => kept.push(key, value),
            Self::Half(kept) => kept.push(key, value),
        }
    }

    fn attend(&self, query: &[f32], weights: &mut [f32], out: &mut [f32]) {
        match self {
            Self::F32(kept) => kept.attend(query, weights, out),
            Self::Half(kept) => kept.attend(query, weights, out),
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
        let new = || {
            if program.half {
                Head::Half(Kept { keys: Vec::new(), values: Vec::new() })
            } else {
                Head::F32(Kept { keys: Vec::new(), values: Vec::new() })
            }
        };
        let ran = program.order.iter().filter_map(|op| match *op {
            Op::Block(i) => Some(&program.blocks[i]),
            _ => None,
        });
        let widths = ran.clone().map(|block| block.head).collect();
        let heads = |block: &Block| collected("heads", (0..block.kv_heads).map(|_| Mutex::new(new())));
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
        const WHAT: &str = "keys and values";
        fn more<T>(kept: &mut Kept<T>, tokens: usize, width: usize) -> Result<()> {
            let n = dims::product(WHAT, tokens, width)?;
            let bytes = dims::product(WHAT, n, size_of::<T>())?;
            let missing = |_| Error::OutOfMemory { what: WHAT, bytes };
            kept.keys.try_reserve(n).map_err(missing)?;
            kept.values.try_reserve(n).map_err(missing)
        }
        self.each(|head, width| match head {
            Head::F32(kept) => more(kept, tokens, width),
            Head::Half(kept) => more(kept, tokens, width),
        })
    }

    /// Forgets all tokens; the room for them stays.
    pub(super) fn restart(&mut self) {
        fn clear<T>(kept: &mut Kept<T>) {
            kept.keys.clear();
            kept.values.clear();
        }
        let _ = self.each(|head, _| {
            match head {
                Head::F32(kept) => clear(kept),
                Head::Half(kept) => clear(kept),
            }
            Ok(())
        });
        self.seen = 0;
    }
}
