// Suffix indexes (quire_kernels.h): tries of the strings of up to `depth` tokens that occur in texts, with counts.
//
// A string that occurred once has no children: what follows it is read from the text. At its second occurrence it gets the child of the
// first, and from then on children are counted. So a text without repetition costs a few nodes per token, and what a token changes are the
// suffixes of the text that occurred before: the chain of links from the longest of them.
#include <cstdlib>
#include <memory>
#include <vector>

#include "quire_kernels.h"

namespace {

using Id = uint32_t;  // of a node; 0: none

struct Node {
    Id parent, link;  // the string without its last token, and without its first
    int32_t token;    // its last
    uint32_t count : 31, has_children : 1;   // occurrences; whether it has occurred twice
    uint32_t continued : 31, is_stale : 1;   // occurrences of children
    uint32_t position;                       // of the last token of the latest occurrence
    Id best;            // the child with the most occurrences, of equals the latest; any child if is_stale; 0: there is none
    Id next, previous;  // siblings, in a ring; `next` of free nodes: another
    Id chain;           // another of the same bucket
};

// The texts of one index, each followed by -1 when it has ended, and the trie of their strings.
struct Index {
    Id root, active;       // active: the longest suffix of the last text with children, of `length` tokens
    uint32_t length = 0;
    uint32_t base = 0;     // position of tokens[0]; positions wrap around
    size_t begin = 0;      // tokens before it are of dropped texts
    int64_t num_nodes = 1;
    std::vector<int32_t> tokens;

    explicit Index(Id the_root) : root(the_root), active(the_root) {}
    int32_t at(uint32_t position) const { return position - base < tokens.size() ? tokens[position - base] : -1; }
    int64_t token_bytes() const { return int64_t(tokens.capacity() * sizeof(int32_t)); }
};

// A string of an index: a node's, or, if that has no children, so many tokens more of its text.
struct Place {
    Id node;
    uint32_t beyond, length;
};

uint32_t hash(Id parent, int32_t token) {
    const uint64_t h = (uint64_t(parent) << 32 | uint32_t(token)) * 0x9e3779b97f4a7c15u;
    return uint32_t(h ^ h >> 32);
}

constexpr int64_t BYTES_OF_NODE = sizeof(Node) + sizeof(Id);  // with its bucket

}  // namespace

struct qk_suffix {
    qk_suffix(int32_t depth, int64_t max_bytes, Node* nodes, Id* buckets)
        : depth_(uint32_t(depth)), max_bytes_(max_bytes), nodes_(nodes), buckets_(buckets) {}
    ~qk_suffix() {
        std::free(nodes_);
        std::free(buckets_);
    }

    int64_t bytes() const { return allocated_ * BYTES_OF_NODE + token_bytes_; }
    int64_t live() const { return live_; }

    int32_t open() {
        if (!has_room(1, 0)) return -1;
        const Id root = take();
        nodes_[root] = {};
        nodes_[root].has_children = 1;
        ++live_;
        size_t slot = 0;
        while (slot < indexes_.size() && indexes_[slot]) ++slot;
        if (slot == indexes_.size()) indexes_.emplace_back();
        indexes_[slot].reset(new Index(root));
        return int32_t(slot);
    }

    void close(int32_t slot) {
        Index& x = *indexes_[size_t(slot)];
        live_ -= x.num_nodes;
        token_bytes_ -= x.token_bytes();
        nodes_[x.root].next = dead_;
        dead_ = x.root;
        indexes_[size_t(slot)].reset();
    }

    int64_t extend(int32_t slot, const int32_t* tokens, int64_t n) {
        Index& x = *indexes_[size_t(slot)];
        for (int64_t i = 0; i < n; ++i) {
            if (!append(x, tokens[i])) return i;
            count_suffixes(x);
        }
        return n;
    }

    int32_t end(int32_t slot) {
        Index& x = *indexes_[size_t(slot)];
        if (!append(x, -1)) return 0;
        x.active = x.root, x.length = 0;
        return 1;
    }

    void drop_first(int32_t slot) {
        Index& x = *indexes_[size_t(slot)];
        for (; x.begin < x.tokens.size() && x.tokens[x.begin] >= 0; ++x.begin) drop_prefixes(x);
        if (x.begin < x.tokens.size()) ++x.begin;
        if (2 * x.begin < x.tokens.size()) return;
        x.tokens.erase(x.tokens.begin(), x.tokens.begin() + int64_t(x.begin));
        x.base += uint32_t(x.begin), x.begin = 0;
    }

    int32_t propose(int32_t slot, const int32_t* context, int64_t n, int32_t max_drafts, double factor, double min_probability,
                    int32_t* token_ids, int32_t* confidences, double* score) {
        Index& x = *indexes_[size_t(slot)];
        Place place = {context ? x.root : x.active, 0, context ? 0 : x.length};
        for (int64_t i = 0; context && i < n; ++i) advance(x, place, context[i]);
        while (place.length && !is_continued(x, place)) shorten(x, place);  // what continued it was dropped
        const double most = factor * double(place.length);
        if (most < double(max_drafts)) max_drafts = int32_t(most);
        double probability = 1.0;
        int32_t drafts = 0;
        for (*score = 0.0; drafts < max_drafts && place.length; ++drafts, *score += probability) {
            uint32_t count = 1, total = 1;
            int32_t token;
            if (nodes_[place.node].has_children) {
                const Node& best = nodes_[best_of(x, place.node)];
                token = best.token, count = best.count, total = nodes_[place.node].continued;
            } else {
                token = x.at(nodes_[place.node].position + place.beyond + 1);
            }
            probability *= double(count) / double(total);
            if (probability < min_probability) break;
            token_ids[drafts] = token;
            confidences[drafts] = bucket_of(count, total, place.length);
            advance(x, place, token);
        }
        return drafts;
    }

  private:
    // Four levels of how much context agrees, and within each four of how often the token followed it; once of once is 1/2.
    static int32_t bucket_of(uint32_t count, uint32_t total, uint32_t length) {
        const double share = double(count) / (double(total) + 1.0);
        return (length < 2 ? 0 : length < 4 ? 4 : length < 8 ? 8 : 12) + (share < 0.4 ? 0 : share < 0.6 ? 1 : share < 0.8 ? 2 : 3);
    }

    // -- nodes: taken from those given back, from those of closed indexes, or from memory not used so far --

    bool has_room(int64_t num_nodes, int64_t more_bytes) const {
        const int64_t reusable = allocated_ - live_;
        const int64_t fresh = num_nodes > reusable ? num_nodes - reusable : 0;
        return bytes() + fresh * BYTES_OF_NODE + more_bytes <= max_bytes_;
    }

    Id take() {
        if (const Id id = free_) {
            free_ = nodes_[id].next;
            return id;
        }
        if (dead_) return take_dead();
        add_bucket();
        return Id(++allocated_);
    }

    // Children go before their parents, so that no child is found under a parent that has become another node.
    Id take_dead() {
        while (const Id child = nodes_[dead_].best) {
            nodes_[dead_].best = 0;
            nodes_[nodes_[child].previous].next = dead_;
            dead_ = child;
        }
        const Id id = dead_;
        dead_ = nodes_[id].next;
        unchain(id);
        return id;
    }

    Id make(Index& x, Id parent, int32_t token, uint32_t position) {
        const Id id = take();
        Id& first = bucket(parent, token);
        Node& node = nodes_[id];
        node = {};
        node.parent = parent, node.link = x.root, node.token = token, node.position = position, node.chain = first;
        first = id;
        node.next = node.previous = id;
        if (const Id sibling = nodes_[parent].best) {
            node.previous = sibling, node.next = nodes_[sibling].next;
            nodes_[node.next].previous = nodes_[sibling].next = id;
        }
        ++live_, ++x.num_nodes;
        return id;
    }

    void give_back(Index& x, Id id) {
        Node& node = nodes_[id];
        Node& parent = nodes_[node.parent];
        if (parent.best == id) parent.best = node.next == id ? 0 : node.next, parent.is_stale = parent.best != 0;
        nodes_[node.next].previous = node.previous, nodes_[node.previous].next = node.next;
        unchain(id);
        node.next = free_, free_ = id;
        --live_, --x.num_nodes;
    }

    // -- a hash table that grows bucket by bucket: linear hashing --

    Id& bucket(Id parent, int32_t token) {
        uint32_t i = hash(parent, token) & (2 * half_ - 1);
        if (i >= num_buckets_) i -= half_;
        return buckets_[i];
    }

    void add_bucket() {
        Id* from = &buckets_[num_buckets_ - half_];
        Id* to = &buckets_[num_buckets_];
        for (*to = 0; *from;) {
            Node& node = nodes_[*from];
            if (hash(node.parent, node.token) & half_) {
                *to = *from, *from = node.chain, to = &node.chain, *to = 0;
            } else {
                from = &node.chain;
            }
        }
        if (++num_buckets_ == 2 * half_) half_ *= 2;
    }

    Id find(Id parent, int32_t token) {
        Id id = bucket(parent, token);
        while (id && (nodes_[id].parent != parent || nodes_[id].token != token)) id = nodes_[id].chain;
        return id;
    }

    void unchain(Id id) {
        Id* at = &bucket(nodes_[id].parent, nodes_[id].token);
        while (*at && *at != id) at = &nodes_[*at].chain;
        if (*at) *at = nodes_[id].chain;  // roots are in no bucket
    }

    // -- learning and forgetting --

    bool append(Index& x, int32_t token) {
        const int64_t before = x.token_bytes(), more = x.tokens.size() == x.tokens.capacity() ? before + 256 : 0;
        if (!has_room(2 * depth_ + 2, more)) return false;
        if (more) x.tokens.reserve(size_t(before + more) / sizeof(int32_t));
        x.tokens.push_back(token);
        token_bytes_ += x.token_bytes() - before;
        return true;
    }

    // Counts the suffixes of the last text that its last token has made, the longest first.
    void count_suffixes(Index& x) {
        const uint32_t position = x.base + uint32_t(x.tokens.size()) - 1;
        const int32_t token = x.tokens.back();
        Id known = 0, longer = 0, longer_below = 0, reached = 0;  // longer: the node whose link is the next one; _below: of children
        uint32_t length = x.length + 1, reached_length = 0;
        int32_t token_below = -1;
        for (Id parent = x.active; parent; parent = nodes_[parent].link, --length) {
            Id id = known ? known : find(parent, token);
            const bool is_new = !id;
            if (is_new) id = make(x, parent, token, position);
            Node& node = nodes_[id];
            known = is_new ? 0 : node.link;
            if (longer) nodes_[longer].link = id;
            longer = is_new ? id : 0;
            if (node.has_children) {
                if (longer_below) nodes_[longer_below].link = find(id, token_below);
                longer_below = 0;
            } else if (!is_new && length < depth_) {
                node.has_children = 1;
                token_below = x.at(node.position + 1);
                if (token_below >= 0) {
                    const Id below = make(x, id, token_below, node.position + 1);
                    nodes_[below].count = node.continued = 1;
                    node.best = below;
                    if (longer_below) nodes_[longer_below].link = below;
                    longer_below = below;
                }
            }
            ++node.count;
            node.position = position;
            if (node.has_children && !reached) reached = id, reached_length = length;
            Node& over = nodes_[parent];
            ++over.continued;
            if (!over.best) over.is_stale = 0;
            if (!over.best || (!over.is_stale && node.count >= nodes_[over.best].count)) over.best = id;
        }
        if (longer_below) nodes_[longer_below].link = find(x.root, token_below);
        x.active = reached ? reached : x.root, x.length = reached_length;
    }

    // Takes back the occurrences of strings that begin at x.begin.
    void drop_prefixes(Index& x) {
        Id id = x.root;
        for (size_t i = x.begin; i < x.begin + depth_ && x.tokens[i] >= 0; ++i) {
            const Id child = find(id, x.tokens[i]);
            if (!child) break;
            --nodes_[id].continued, --nodes_[child].count;
            if (nodes_[id].best == child) nodes_[id].is_stale = 1;
            id = child;
        }
        while (id != x.root && !nodes_[id].count) {
            const Id parent = nodes_[id].parent;
            give_back(x, id);
            id = parent;
        }
    }

    // -- what comes next --

    Id best_of(const Index& x, Id id) {
        Node& node = nodes_[id];
        if (!node.is_stale) return node.best;
        for (Id other = nodes_[node.best].next, last = node.best; other != last; other = nodes_[other].next) {
            const Node &a = nodes_[other], &b = nodes_[node.best];
            if (a.count > b.count || (a.count == b.count && a.position - x.base > b.position - x.base)) node.best = other;
        }
        node.is_stale = 0;
        return node.best;
    }

    bool is_continued(const Index& x, const Place& place) const {
        const Node& node = nodes_[place.node];
        return node.has_children ? node.continued > 0 : x.at(node.position + place.beyond + 1) >= 0;
    }

    // Moves from a string to the one without its first token.
    void shorten(const Index& x, Place& place) {
        const uint32_t from = nodes_[place.node].position + 1, steps = place.beyond;
        place = {nodes_[place.node].link, 0, place.length - 1};
        for (uint32_t i = 0; i < steps; ++i) {
            if (!nodes_[place.node].has_children) {
                place.beyond = steps - i;
                return;
            }
            place.node = find(place.node, x.at(from + i));
        }
    }

    // Moves from a string to the longest suffix of it and `token` that is continued somewhere, of less than `depth` tokens.
    void advance(const Index& x, Place& place, int32_t token) {
        for (;; shorten(x, place)) {
            const Node& node = nodes_[place.node];
            if (!node.has_children) {
                if (x.at(node.position + place.beyond + 1) == token) {
                    ++place.beyond;
                    break;
                }
            } else if (const Id child = find(place.node, token)) {
                place.node = child;
                break;
            }
            if (!place.length) return;
        }
        ++place.length;
        while (place.length && (place.length >= depth_ || !is_continued(x, place))) shorten(x, place);
    }

    const uint32_t depth_;
    const int64_t max_bytes_;
    Node* const nodes_;
    Id* const buckets_;
    uint32_t half_ = 1, num_buckets_ = 1;
    int64_t allocated_ = 0, live_ = 0, token_bytes_ = 0;
    Id free_ = 0, dead_ = 0;
    std::vector<std::unique_ptr<Index>> indexes_;
};

qk_suffix* qk_suffix_create(int32_t depth, int64_t max_bytes) {
    const int64_t fitting = max_bytes / BYTES_OF_NODE, most = int64_t(1) << 31, room = (fitting < most ? fitting : most) + 1;
    // pages that no node has used take no memory
    Node* nodes = (Node*)std::malloc(size_t(room) * sizeof(Node));
    Id* buckets = (Id*)std::calloc(size_t(room), sizeof(Id));
    if (nodes && buckets) return new qk_suffix(depth, (fitting < most ? max_bytes : most * BYTES_OF_NODE), nodes, buckets);
    std::free(nodes);
    std::free(buckets);
    return nullptr;
}
void qk_suffix_destroy(qk_suffix* suffix) { delete suffix; }
int64_t qk_suffix_bytes(const qk_suffix* suffix) { return suffix->bytes(); }
int64_t qk_suffix_nodes(const qk_suffix* suffix) { return suffix->live(); }
int32_t qk_suffix_open(qk_suffix* suffix) { return suffix->open(); }
void qk_suffix_close(qk_suffix* suffix, int32_t index) { suffix->close(index); }
int64_t qk_suffix_extend(qk_suffix* suffix, int32_t index, const int32_t* tokens, int64_t n) { return suffix->extend(index, tokens, n); }
int32_t qk_suffix_end(qk_suffix* suffix, int32_t index) { return suffix->end(index); }
void qk_suffix_drop_first(qk_suffix* suffix, int32_t index) { suffix->drop_first(index); }
int32_t qk_suffix_propose(qk_suffix* suffix, int32_t index, const int32_t* context, int64_t n, int32_t max_drafts, double factor,
                          double min_probability, int32_t* token_ids, int32_t* confidences, double* score) {
    return suffix->propose(index, context, n, max_drafts, factor, min_probability, token_ids, confidences, score);
}
