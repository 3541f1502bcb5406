# SPDX-License-Identifier: Apache-2.0
# The stand-in for Huawei's HIXL: tests/hixl_standin/README.md. The root Makefile includes this.

CXX ?= g++
STANDIN := tests/hixl_standin
STANDIN_OUT := build/hixl_standin
STANDIN_FLAGS := -std=c++17 -O2 -g -fPIC -pthread -Wall -Wextra -Werror -fvisibility=hidden
STANDIN_LINK := -shared -pthread -Wl,-z,defs -Wl,--no-undefined-version -Wl,-rpath,'$$ORIGIN'
STANDIN_HEADERS := $(wildcard $(STANDIN)/*.h)
STANDIN_metadef := ascend_string
STANDIN_acl_rt := acl acl_event acl_memory knobs
STANDIN_cann_hixl := api connect_pool device engine engine_poll engine_transfer json link memory_table options page \
	requests server wire
STANDIN_SMOKE := $(wildcard $(STANDIN)/smoke*.cc)
STANDIN_LIBS := libmetadef.so libacl_rt.so libcann_hixl.so

.PHONY: hixl-standin hixl-standin-smoke
hixl-standin: $(STANDIN_LIBS:%=$(STANDIN_OUT)/lib64/%) $(STANDIN_LIBS:%=$(STANDIN_OUT)/abi1/lib64/%) \
	$(STANDIN_OUT)/raw_server

# $1 directory, $2 flags of the libraries, $3 of the smoke program. Libraries are moved into place whole: a program
# may be about to load them.
define STANDIN_BUILD
$(STANDIN_OUT)/$1obj/%.o: $(STANDIN)/%.cc $$(STANDIN_HEADERS) $(STANDIN)/standin.mk
	@mkdir -p $$(@D)
	$$(CXX) $$(STANDIN_FLAGS) $2 -c $$< -o $$@
$(STANDIN_OUT)/$1lib64/libmetadef.so: $$(STANDIN_metadef:%=$(STANDIN_OUT)/$1obj/%.o) $(STANDIN)/metadef.map
$(STANDIN_OUT)/$1lib64/libacl_rt.so: $$(STANDIN_acl_rt:%=$(STANDIN_OUT)/$1obj/%.o) $(STANDIN)/acl_rt.map
$(STANDIN_OUT)/$1lib64/libcann_hixl.so: $$(STANDIN_cann_hixl:%=$(STANDIN_OUT)/$1obj/%.o) $(STANDIN)/hixl.map \
		$(STANDIN_OUT)/$1lib64/libmetadef.so $(STANDIN_OUT)/$1lib64/libacl_rt.so
$(STANDIN_OUT)/$1lib64/%.so:
	@mkdir -p $$(@D)
	$$(CXX) $$(STANDIN_LINK) $2 -Wl,-soname,$$(@F) -Wl,--version-script,$$(filter %.map,$$^) \
		$$(filter %.o,$$^) $$(filter %.so,$$^) -o $$@.new && mv $$@.new $$@
$(STANDIN_OUT)/$1smoke: $$(STANDIN_SMOKE) $$(STANDIN_LIBS:%=$(STANDIN_OUT)/$1lib64/%) $$(STANDIN_HEADERS)
	$$(CXX) -std=c++17 -O1 -g -pthread -Wall -Wextra -Werror $3 $$(filter %.cc %.so,$$^) \
		-Wl,-rpath,'$$$$ORIGIN/lib64' -o $$@
endef
# A plain program of HIXL's, for tests.
$(STANDIN_OUT)/raw_server: $(STANDIN)/raw_server.cc $(STANDIN_LIBS:%=$(STANDIN_OUT)/lib64/%) $(STANDIN_HEADERS)
	$(CXX) -std=c++17 -O1 -g -pthread -Wall -Wextra -Werror -D_GLIBCXX_USE_CXX11_ABI=0 $(filter %.cc %.so,$^) \
		-Wl,-rpath,'$$ORIGIN/lib64' -o $@.new && mv $@.new $@

# A caller of either string ABI must do, so the smoke program of the first build is of the other ABI than its libraries.
STANDIN_COMMA := ,
STANDIN_ASAN := -fsanitize=address$(STANDIN_COMMA)undefined
$(eval $(call STANDIN_BUILD,,-D_GLIBCXX_USE_CXX11_ABI=0,-D_GLIBCXX_USE_CXX11_ABI=1))
$(eval $(call STANDIN_BUILD,abi1/,-D_GLIBCXX_USE_CXX11_ABI=1,-D_GLIBCXX_USE_CXX11_ABI=1))
$(eval $(call STANDIN_BUILD,asan/,-O1 -fno-omit-frame-pointer $$(STANDIN_ASAN),$$(STANDIN_ASAN)))
$(eval $(call STANDIN_BUILD,tsan/,-O1 -fno-omit-frame-pointer -fsanitize=thread,-fsanitize=thread))

STANDIN_SMOKES := smoke abi1/smoke asan/smoke tsan/smoke
# The sanitizers' shadow memory can collide with a kernel's wide address randomisation.
STANDIN_FIXED = $(shell setarch -R true 2>/dev/null && echo setarch -R)
hixl-standin-smoke: $(STANDIN_SMOKES:%=$(STANDIN_OUT)/%)
	@for program in $^; do echo "$$program"; $(STANDIN_FIXED) $$program || exit 1; done
