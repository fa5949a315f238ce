// Selections whose sequences differ in length, lie packed or in pages, and others whose tiles the
// host cannot cut: rows and keys are copied to tensors of one length for all, some batch entries at
// a time, with tables of how many exist. Each sequence has the bits of a call of its own, since a
// selection looks at no row or key past an entry's. Of others keys of 8 bits alone are copied, as
// numbers of the queries' type.
#pragma once

#include "../../arena.h"
#include "../../select_params.h"

namespace sparse_attn::cuda {

/// Whether the walks need what gather_entries makes.
bool is_gathered(const SelectParams& params);

/// The selection of `count` batch entries from `first` on, with room for their copies.
SelectParams gathered_entries(const SelectParams& params, int32_t first, int32_t count,
                              Arena* arena);

/// Fills the tables and copies of gathered_entries(params, first, ...).
Status gather_entries(const SelectParams& params, int32_t first, const SelectParams& entries);

}  // namespace sparse_attn::cuda
