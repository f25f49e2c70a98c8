#include "common/paged/shared_reading.h"

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "common/base/check.h"

namespace common {
namespace {

// A sequence that may be in a group.
struct Member {
  int sequence;
  int num_blocks;     // how many of its blocks were full before the step
  const int* blocks;  // its table
  std::int64_t cost;  // of its queries
};

// A node of the trie of all tables: a range of the members, which share the first `depth` blocks. Nodes are in
// preorder, and the ranges of a node's children are parts of its own: a member in none of these is the node's own.
struct Node {
  int parent;  // -1: it is the root
  int level;   // how many ancestors it has
  int begin;
  int end;
  int depth;
  int last_descendant;
  int reader;  // the group of the node's own members: its own or its nearest ancestor's that has one; -1: none
};

// The first of the indices begin … end at which two tables differ, or end. Equal pieces are compared as bytes, which is
// several times faster than block by block.
int first_difference(const int* left, const int* right, int begin, int end) {
  constexpr int kPiece = 64;
  while (end - begin > kPiece && std::equal(left + begin, left + begin + kPiece, right + begin)) {
    begin += kPiece;
  }
  return static_cast<int>(std::mismatch(left + begin, left + end, right + begin).first - left);
}

class Search {
 public:
  Search(const StepTables& tables, const ReadingCosts& costs) : costs_(costs) {
    for (std::size_t i = 0; i < tables.context_lengths.size(); ++i) {
      const int num_queries = tables.query_starts[i + 1] - tables.query_starts[i];
      const int num_blocks = (tables.context_lengths[i] - num_queries) / tables.block_size;
      const Member member{static_cast<int>(i), num_blocks, tables.block_tables.data() + tables.table_starts[i],
                          num_queries * costs.query};
      if (num_queries > 0 && gain(member, num_blocks) > 0) {
        COMMON_CHECK(tables.table_starts[i] + std::int64_t{num_blocks} <= std::ssize(tables.block_tables),
                     "the block table covers the context");
        members_.push_back(member);
      }
    }
  }

  std::vector<SharedPrefix> run() {
    if (members_.size() < 2) {
      return {};
    }
    add_node(-1, 0, static_cast<int>(members_.size()));
    for (int i = static_cast<int>(nodes_.size()) - 1; i >= 0; --i) {  // children first
      weigh(i);
    }
    std::vector<SharedPrefix> groups(nodes_.size());
    for (int i = 0; i < static_cast<int>(nodes_.size()); ++i) {  // parents first
      choose(i);
      const int reader = node(i).reader;
      if (reader < 0) {
        continue;
      }
      SharedPrefix& group = groups[static_cast<std::size_t>(reader)];
      group.num_blocks = node(reader).depth;
      for_own_members(i, [&](const Member& member) {
        if (gain(member, group.num_blocks) > 0) {
          group.sequences.push_back(member.sequence);
        }
      });
    }
    std::erase_if(groups, [](const SharedPrefix& group) { return group.sequences.empty(); });
    for (SharedPrefix& group : groups) {
      std::sort(group.sequences.begin(), group.sequences.end());
    }
    std::sort(groups.begin(), groups.end(), [](const SharedPrefix& left, const SharedPrefix& right) {
      return left.sequences.front() < right.sequences.front();
    });
    return groups;
  }

 private:
  Node& node(int index) { return nodes_[static_cast<std::size_t>(index)]; }

  // What is saved if the member does not read so many blocks. It is in no group that would cost it more.
  std::int64_t gain(const Member& member, int num_blocks) const {
    return std::max<std::int64_t>(0, num_blocks * costs_.block - member.cost);
  }

  // Adds the node of the members begin … end - 1, and its descendants.
  void add_node(int parent, int begin, int end) {
    const auto first = members_.begin() + begin;
    const auto last = members_.begin() + end;
    const int known = parent < 0 ? 0 : node(parent).depth;
    int depth = first->num_blocks;
    for (auto member = first + 1; member != last; ++member) {
      depth = first_difference(first->blocks, member->blocks, known, std::min(depth, member->num_blocks));
    }
    const auto index = static_cast<int>(nodes_.size());
    nodes_.push_back({parent, parent < 0 ? 0 : node(parent).level + 1, begin, end, depth, index, -1});
    first_best_.push_back(best_.size());
    best_.resize(best_.size() + static_cast<std::size_t>(nodes_.back().level) + 1);

    auto child = std::partition(first, last, [&](const Member& member) { return member.num_blocks == depth; });
    std::sort(child, last,
              [&](const Member& left, const Member& right) { return left.blocks[depth] < right.blocks[depth]; });
    while (child != last) {
      const auto next =
          std::find_if(child, last, [&](const Member& member) { return member.blocks[depth] != child->blocks[depth]; });
      if (next - child > 1) {
        add_node(index, static_cast<int>(child - members_.begin()), static_cast<int>(next - members_.begin()));
      }
      child = next;
    }
    node(index).last_descendant = static_cast<int>(nodes_.size()) - 1;
  }

  template <typename Visit>
  void for_children(int parent, const Visit& visit) {
    for (int child = parent + 1; child <= node(parent).last_descendant; child = node(child).last_descendant + 1) {
      visit(child);
    }
  }

  template <typename Visit>
  void for_own_members(int index, const Visit& visit) {
    int begin = node(index).begin;
    const auto visit_until = [&](int end) {
      for (; begin < end; ++begin) {
        visit(members_[static_cast<std::size_t>(begin)]);
      }
    };
    for_children(index, [&](int child) {
      visit_until(node(child).begin);
      begin = node(child).end;
    });
    visit_until(node(index).end);
  }

  // What the node's members save if `reader` is the nearest group above what their own nodes decide; -1: there is none.
  std::int64_t saved(int index, int reader) {
    const int depth = reader < 0 ? 0 : node(reader).depth;
    std::int64_t sum = 0;
    for_own_members(index, [&](const Member& member) { sum += gain(member, depth); });
    for_children(index, [&](int child) { sum += best(child, reader); });
    return sum;
  }

  // The same if the node is the reader; a group reads its blocks once.
  std::int64_t saved_as_reader(int index) {
    return saved(index, index) - node(index).depth * (costs_.block + costs_.group_block) - costs_.group;
  }

  // The most that the node's members can save, by the reader above the node: one of its ancestors, or none.
  std::int64_t& best(int index, int reader) {
    const int option = reader < 0 ? 0 : node(reader).level + 1;
    return best_[first_best_[static_cast<std::size_t>(index)] + static_cast<std::size_t>(option)];
  }

  void weigh(int index) {
    const std::int64_t as_reader = saved_as_reader(index);
    best(index, -1) = std::max(as_reader, saved(index, -1));
    for (int reader = node(index).parent; reader >= 0; reader = node(reader).parent) {
      best(index, reader) = std::max(as_reader, saved(index, reader));
    }
  }

  void choose(int index) {
    const int parent = node(index).parent;
    const int above = parent < 0 ? -1 : node(parent).reader;
    node(index).reader = saved_as_reader(index) > saved(index, above) ? index : above;
  }

  ReadingCosts costs_;
  std::vector<Member> members_;
  std::vector<Node> nodes_;
  std::vector<std::size_t> first_best_;  // [nodes]: where a node's values begin in best_
  std::vector<std::int64_t> best_;       // for each node, one for each ancestor and one for none
};

}  // namespace

ReadingCosts reading_costs(int num_heads, int num_kv_heads, int head_dim, int block_size, int bytes_per_element) {
  constexpr std::int64_t kPartials = 2;  // of the shared blocks, and of the rest
  constexpr std::int64_t kMargin = 2;
  const std::int64_t partial = std::int64_t{num_heads} * (head_dim + 2) * static_cast<std::int64_t>(sizeof(float));
  return {.block = std::int64_t{2} * num_kv_heads * block_size * head_dim * bytes_per_element,
          .query = kMargin * kPartials * 2 * partial,
          .group = 0};
}

std::vector<SharedPrefix> find_shared_prefixes(const StepTables& tables, const ReadingCosts& costs) {
  const std::size_t num_sequences = tables.context_lengths.size();
  COMMON_CHECK(tables.query_starts.size() > num_sequences && tables.table_starts.size() >= num_sequences &&
                   tables.block_size > 0,
               "an array of the step is too short");
  COMMON_CHECK(costs.block > 0 && costs.query >= 0 && costs.group >= 0 && costs.group_block >= 0,
               "reading a block costs something, and no cost is negative");
  return Search(tables, costs).run();
}

std::int64_t num_blocks_saved(std::span<const SharedPrefix> groups) {
  std::int64_t sum = 0;
  for (const SharedPrefix& group : groups) {
    sum += std::int64_t{group.num_blocks} * (static_cast<std::int64_t>(group.sequences.size()) - 1);
  }
  return sum;
}

}  // namespace common
